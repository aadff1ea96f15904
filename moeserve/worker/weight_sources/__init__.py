"""The places from which a rank's weights can come, in a file each."""
