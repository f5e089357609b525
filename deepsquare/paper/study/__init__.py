"""The study: a plan of training runs, fixed before they start, and what runs it."""
