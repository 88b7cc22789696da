_shuffle = None
