"""OpenAI-compatible completions over HTTP, in front of a swarm that serves.

server     the HTTP server: access, limits, routes
request    parsing and checking of a client's request
outputs    the outputs of a request, written concurrently
text       bytes to text, with stop sequences
reply      answers and errors
health     whether the swarm would answer now
"""
