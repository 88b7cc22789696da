ClipRewardEnv = EpisodicLifeEnv = FireResetEnv = MaxAndSkipEnv = NoopResetEnv = None
