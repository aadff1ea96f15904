"""The doors: what a user's program calls, and the text that goes in and out."""
