"""`moeserve launch`: a Ray cluster for one command, on the nodes where the same command line is run."""
