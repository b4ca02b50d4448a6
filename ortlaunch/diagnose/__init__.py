"""The diagnosis of a run from its folder alone: a verdict, the evidence and advice.

`evidence` reads, `causes` decides, `report` renders. Control side: no torch. May import
run.status, planning and recipe.
"""
