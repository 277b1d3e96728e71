"""Continuing prompts with a language model: sampling rules, the decoding loop, saved states."""

__all__ = ["decoding", "sampling"]
