"""Samples whose tokens are hidden and predicted: BERT and T5 pretraining."""
