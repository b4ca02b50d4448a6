"""Why a run ended as it did, from its folder alone: a verdict, what it rests on, and what to try.

evidence reads, causes decides, report says. Control side: no torch. May import run.status, planning and recipe.
"""
