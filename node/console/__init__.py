"""What a person at a terminal sees.

terminal    progress bars or plain lines; errors; a model's bytes; signals
amounts     sizes and durations in words
progress    the progress of a local training run
results     results as text, as tables and as JSON
"""
