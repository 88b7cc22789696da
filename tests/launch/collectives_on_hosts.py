"""Measures collectives between hosts whose links have a known rate, and compares them with iperf3.

    python tests/launch/collectives_on_hosts.py --out results/collectives_…      (minutes; root, iproute2, iperf3)

For each rate and number of hosts: results.json of `samestep collectives`, what iperf3 measures on the same link, and
one table. Exit 1 where send_recv or all_reduce is more than 10 % off the rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from budget import budget, wait_until
from cluster.hosts import Hosts

RATES = {"100mbit": 100e6, "1gbit": 1e9}  # bits per second
OPS = "send_recv,all_reduce,reduce_scatter_tensor,all_gather,all_to_all_single,broadcast,reduce"
BY_RATE = ("send_recv", "all_reduce")  # whose bus bandwidth must be the link's
WITHIN = 0.10
IPERF_S = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=[*RATES])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    far = False
    for rate in asked.rates:
        for count in asked.hosts:
            results, iperf = measured(count, rate)
            name = f"{count}-hosts-{rate}"
            (asked.out / f"{name}.json").write_text(json.dumps({"iperf3_bits_per_second": iperf, **results}))
            lines, off = table(results, iperf, RATES[rate], count, rate)
            (asked.out / f"{name}.txt").write_text("\n".join(lines) + "\n")
            print("\n".join(lines), flush=True)
            far |= off
    raise SystemExit(int(far))


def measured(count: int, rate: str) -> tuple[dict[str, object], float]:
    """results.json of a run on `count` hosts, and iperf3's bits per second from host 1 to host 0."""
    with Hosts(count) as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.shape(rate)
        out = f"{folder}/out"
        line = [sys.executable, "-m", "samestep", "collectives", "--nnodes", str(count), "--nproc", "1"]
        line += ["--master-addr", "h0", "--out", out, "--op", OPS, "--dtype", "float32", "--seconds", "2"]
        line += ["--sizes", "64KiB,1MiB,4MiB,8MiB" if rate == "100mbit" else "64KiB,1MiB,16MiB,64MiB"]
        typed = [hosts.start(i, [*line, "--node-rank", str(i)]) for i in range(count)]
        codes = [command.wait(budget(400)) for command in typed]
        assert codes == [0] * count, codes
        found = json.loads(Path(out, "results.json").read_text())
        return found, iperf3(hosts)


def iperf3(hosts: Hosts) -> float:
    if shutil.which("iperf3") is None:
        return 0.0
    server = hosts.start(0, ["iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
    wait_until(lambda: any(at.endswith(":5201") for at in hosts.listening(0)), "iperf3 does not listen at its port")
    asked = hosts.line(1, ["iperf3", "--client", hosts.address(0), "--time", str(IPERF_S), "--json"])
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    server.wait(budget(10))
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"])


def table(results: dict[str, object], iperf: float, link: float, count: int, rate: str) -> tuple[list[str], bool]:
    """The table's lines, and whether a bus bandwidth that must be the link's is not."""
    of_rate = 100 * iperf / link
    lines = [f"{count} hosts, links of {rate}; iperf3: {iperf / 1e6:.1f} Mbit/s ({of_rate:.1f} % of the rate)"]
    lines.append(f"{'collective':<24}{'size':>12}{'calls':>7}{'ms':>10}{'bus Mbit/s':>12}{'of the rate':>13}")
    off = False
    for curve in results["curves"]:  # type: ignore[attr-defined]
        for point in curve["points"]:
            seconds, bus = sorted(point["seconds"]), 8 * point["bus_bandwidth"]
            cells = f"{point['size']:>12,}{len(seconds):>7}{1e3 * seconds[len(seconds) // 2]:>10.1f}{bus / 1e6:>12.1f}"
            lines.append(f"{curve['collective']:<24}{cells}{100 * bus / link:>11.1f} %")
        off |= curve["collective"] in BY_RATE and abs(bus / link - 1) > WITHIN
    return lines, off


if __name__ == "__main__":
    main()
