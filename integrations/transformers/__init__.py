"""Governed Hugging Face transformers: continuous batching and the classic cache classes."""
