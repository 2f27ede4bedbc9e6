"""What a person at a terminal sees.

terminal    progress that moves, or plain lines; errors; bytes
progress    what a run in progress tells whoever watches it
results     results as text and as JSON
"""
