"""Vocabularies: lists of draft tokens and the maps made of them, and the order of a head's rows."""
