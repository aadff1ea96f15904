"""`moeserve launch`: a Ray cluster for one command, made of the nodes on which the same command line is run."""
