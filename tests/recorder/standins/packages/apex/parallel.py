DistributedDataParallel = None
