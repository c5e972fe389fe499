"""Long answers: problems that a model reasons about, asked in vLLM under policies: how long, ended, right."""
