"""A second instrument: a small language model of code, trained on sources that this project's environment has.

In this order: `corpus`, `train`, `export`, `evaluate`, `card`, each a command of its own.
"""
