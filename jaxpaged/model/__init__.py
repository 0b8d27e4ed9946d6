"""The model: its configuration and files, its tokenizer, and the decoder that computes it."""
