"""What a person at a terminal sees.

terminal    progress that moves, or plain lines; errors; bytes
amounts     sizes and durations in words
progress    what a run in progress tells whoever watches it
results     results as text, as tables and as JSON
"""
