"""From text to tokens and back: tokenizer, chat templates, streamed text and where it stops."""
