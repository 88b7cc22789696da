from samestep.rules import Rule

RULE = Rule(
    en="each of the {workers} loader workers reads the same rows: an IterableDataset is copied into every worker, and __iter__ must share its rows out by get_worker_info() as well as by rank",
    zh="{workers} 个 DataLoader worker 各自读取相同的数据行：IterableDataset 会被复制到每个 worker 中，__iter__ 除了按 rank，还必须按 get_worker_info() 划分数据",
    broken="""
class Rows(IterableDataset):
    def __iter__(self):
        yield from self.rows[rank::world]
""",
    right="""
class Rows(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self.rows[rank * workers + number :: world * workers]
""",
)
