"""Prove that a checkpoint serves: start a real engine on it, decode, and judge what was decoded against its source.

``engine.py`` is what every engine's module gives; ``transformers.py`` and the modules beside it are the engines. A run
goes ``matrix → cell → process + engine → judge``; nothing but ``judge.py`` decides whether figures are good.
"""
