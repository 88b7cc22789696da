"""Measures collectives between hosts whose links have a known rate, and compares them with iperf3.

    python tests/launch/collectives_on_hosts.py --out results/collectives_…      (minutes; root, iproute2, iperf3)

For each rate and number of hosts: results.json of `samestep collectives`, what iperf3 measures on the same link, and
one table. Exit 1 where the largest send_recv is more than 10 % off what iperf3 receives, or the largest all_reduce,
which sends and receives at once, more than 10 % off what `iperf3 --bidir` receives in its slower direction.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from budget import budget, wait_until
from cluster.hosts import Hosts

RATES = {"100mbit": 100e6, "1gbit": 1e9}  # bits per second
OPS = "send_recv,all_reduce,reduce_scatter_tensor,all_gather,all_to_all_single,broadcast,reduce"
ONE_WAY, BOTH_WAYS = "send_recv", "all_reduce"  # whose bus bandwidth must be iperf3's
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
            (asked.out / f"{name}.json").write_text(json.dumps({"iperf3_bits_per_second": iperf, **results}) + "\n")
            lines, off = table(results, iperf, RATES[rate], count, rate)
            (asked.out / f"{name}.txt").write_text("\n".join(lines) + "\n")
            print("\n".join(lines), flush=True)
            far |= off
    raise SystemExit(int(far))


def measured(count: int, rate: str) -> tuple[dict[str, object], dict[str, float]]:
    """results.json of a run on `count` hosts, and what iperf3 measures between two of them."""
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
        one_way = iperf3(hosts)["sum_received"]
        both = iperf3(hosts, "--bidir")
        slower = min(both[key] for key in ("sum_received", "sum_received_bidir_reverse"))
        return found, {ONE_WAY: one_way, BOTH_WAYS: slower}


def iperf3(hosts: Hosts, *options: str) -> dict[str, float]:
    """Returns the bits per second of each sum that iperf3 reports, from host 1 to host 0."""
    server = hosts.start(0, ["iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
    wait_until(lambda: any(at.endswith(":5201") for at in hosts.listening(0)), "iperf3 does not listen at its port")
    asked = hosts.line(1, ["iperf3", "--client", hosts.address(0), "--time", str(IPERF_S), "--json", *options])
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    server.wait(budget(10))
    return {
        name: float(part["bits_per_second"])
        for name, part in json.loads(done.stdout)["end"].items()
        if name[:3] == "sum"
    }


def table(
    results: dict[str, object], iperf: dict[str, float], link: float, count: int, rate: str
) -> tuple[list[str], bool]:
    """The table's lines, and whether a bus bandwidth that must be iperf3's is not."""
    one_way, both_ways = (f"{iperf[each] / 1e6:.1f}" for each in (ONE_WAY, BOTH_WAYS))
    lines = [f"{count} hosts, links of {rate}; iperf3: {one_way} Mbit/s one way, {both_ways} both ways at once"]
    lines.append(f"{'collective':<24}{'size':>12}{'calls':>7}{'ms':>10}{'bus Mbit/s':>12}{'of the rate':>13}")
    off = False
    for curve in results["curves"]:  # type: ignore[attr-defined]
        bus = 0.0
        for point in curve["points"]:
            seconds, bus = sorted(point["seconds"]), 8 * point["bus_bandwidth"]
            cells = f"{point['size']:>12,}{len(seconds):>7}{1e3 * seconds[len(seconds) // 2]:>10.1f}{bus / 1e6:>12.1f}"
            lines.append(f"{curve['collective']:<24}{cells}{100 * bus / link:>11.1f} %")
        expected = iperf.get(curve["collective"])
        off |= expected is not None and abs(bus / expected - 1) > WITHIN
    return lines, off


if __name__ == "__main__":
    main()
