"""HTTP in the form of OpenAI's completions, in front of a swarm that serves."""
