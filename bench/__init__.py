"""What moeserve is measured with, against whom, and the commands that reproduce it."""
