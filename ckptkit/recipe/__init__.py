"""Recipes: YAML read, its rules, presets of schemes."""
