"""Hugging Face libraries on Holdfast: `transformers`."""
