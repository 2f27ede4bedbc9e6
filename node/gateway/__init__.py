"""HTTP in the form of OpenAI's completions, in front of a swarm that serves.

server     who may ask, how many at once, how long
request    what a client asks for
outputs    its outputs, written at the same time
text       bytes into text, never half a character
reply      answers and errors
health     whether the swarm would answer now
"""
