"""A second instrument: a small language model of code, trained on sources that this project's environment has."""
