"""Hugging Face glue: the only room, besides engine, evaluation and cli, that knows transformers."""
