"""Catches the attention calls of models: `shadow`, torch models, Hugging Face transformers."""
