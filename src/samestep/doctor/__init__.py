"""The doctor: finds what is wrong with a machine, or with several and the network between them, before a training."""
