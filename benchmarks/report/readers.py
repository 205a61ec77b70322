"""Where a claim's two numbers stand in what a benchmark reports as JSON, ours first, in base units.

A reader raises KeyError, IndexError, TypeError or ValueError where the report has no such numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reading:
    """A claim's numbers, and words that its sentence takes from the report."""

    ours: float
    peer: float
    words: dict[str, Any] = field(default_factory=dict)


def row(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The one row with these values.

    Raises:
        KeyError: no row has them, or several do.
    """
    found = [entry for entry in rows if all(entry[key] == value for key, value in values.items())]
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows with {values}")
    return found[0]


def kda(peer: str, mode: str, key: str) -> Callable[[Any], Reading]:
    """Ours and a peer's at the longest sequence that the peer ran."""

    def read(report: Any) -> Reading:
        results, sizes = report["results"], report["sizes"]
        length = max((r["length"] for r in results if r["name"] == peer), default=None)
        ours, its = (row(results, name=name, length=length, mode=mode) for name in ("ours_torch", peer))
        words = {"T": f"{length:,}", "H": sizes["heads"], "K": sizes["K"], "n": ours["runs"], "m": its["runs"]}
        return Reading(ours[key], its[key], words)

    return read


def kda_growth(report: Any) -> Reading:
    """CPU seconds per token at the longest sequence and at the shortest."""
    ours = [r for r in report["results"] if r["name"] == "ours_torch" and r["mode"] == "fwd+bwd"]
    ends = [pick(ours, key=lambda r: r["length"]) for pick in (max, min)]
    long, short = (r["cpu_seconds"] / r["length"] for r in ends)
    return Reading(long, short, {"long": f"{ends[0]['length']:,}", "short": f"{ends[1]['length']:,}"})


def attnres_rows(layout: list[int], peer: str) -> Callable[[Any], Reading]:
    """Rows over all hops: with the cache against without it, or against one row per hop."""

    def read(report: Any) -> Reading:
        counted = row(report["counted"], layout=layout)
        return Reading(counted["rows"]["on"], counted["hops"] if peer == "residual" else counted["rows"][peer])

    return read


def attnres_bytes(report: Any) -> Reading:
    """Bytes that gloo carried in the first measured layout."""
    layout = report["measured"][0]["layout"]
    on, off = (row(report["measured"], layout=layout, cache=mode)["bytes_per_direction"] for mode in ("on", "off"))
    return Reading(on, off, dict(zip("PVN", layout, strict=True)))


def attnres_quality(key: str) -> Callable[[Any], Reading]:
    """The two arms' mean final loss, or their seconds."""

    def read(report: Any) -> Reading:
        arms, options = report["arms"], report["options"]
        value = {"loss": lambda arm: arm["curve"][-1], "seconds": lambda arm: arm["seconds"]}[key]
        edge = [name for name, arm in arms.items() if arm["lr_at_the_edge_of_the_sweep"]]
        note = f"; best rate at the edge of the sweep: {', '.join(edge)}" if edge else ""
        words = {"steps": options["steps"], "layers": options["layers"], "note": note}
        return Reading(value(arms["attnres"]), value(arms["standard"]), words)

    return read


def moonep(routing: str, key: str, peer: str = "alltoall", scale: float = 1.0) -> Callable[[Any], Reading]:
    """MoonEP's row of the table and a dispatcher's."""

    def read(report: Any) -> Reading:
        ours, its = (row(report["rows"], routing=routing, dispatcher=name)[key] for name in ("moonep", peer))
        return Reading(ours * scale, its * scale, {"ranks": report["options"]["ranks"]})

    return read


def moonep_slots(peer: str, index: int) -> Callable[[Any], Reading]:
    """Redundant experts summed over all loads: the fullest rank's (0) or all ranks' (1)."""

    def read(report: Any) -> Reading:
        rows = report["rows"]
        if peer == "optimum":
            rows = [r for r in rows if r["optimum"] is not None and r["optimum"]["proven"]]
            if not rows:
                raise ValueError("no case has a proven optimum: give the integer program longer, --ilp-seconds")
        its = sum(r["optimum"]["redundant"][index] if peer == "optimum" else r["alias"][index] for r in rows)
        return Reading(sum(r["ours"][index] for r in rows), its, {"cases": len(rows)})

    return read


PER_HEAD = "peer to peer, per head, balanced"


def muon_counted(model: str, ranks: int, key: str, peer: str, ours: str = PER_HEAD) -> Callable[[Any], Reading]:
    """Two methods on one bucket layout."""

    def read(report: Any) -> Reading:
        rows = (row(report["counted"], model=model, ranks=ranks, method=method)[key] for method in (ours, peer))
        return Reading(*rows)

    return read


def muon_timed(key: str, peer: str, scale: float = 1.0) -> Callable[[Any], Reading]:
    """Two optimizers on gloo ranks."""

    def read(report: Any) -> Reading:
        ours, its = (row(report["timed"], optimizer=name)[key] * scale for name in ("per-head-muon", peer))
        return Reading(ours, its, {"ranks": report["options"]["ranks"], "hidden": report["options"]["hidden"]})

    return read


def qat(value: Callable[[dict[str, Any]], float], peer: Callable[[dict[str, Any]], float]) -> Callable[[Any], Reading]:
    """Means over the seeds."""

    def read(report: Any) -> Reading:
        seeds = report["seeds"]
        ours, its = (sum(function(arms) for arms in seeds) / len(seeds) for function in (value, peer))
        return Reading(ours, its, {"steps": report["options"]["steps"], "seeds": len(seeds)})

    return read


def zero2(key: str, name: str = "pipeline-zero2", scale: float = 1.0) -> Callable[[Any], Reading]:
    """Pipeline ZeRO-2's row and the distributed optimizer's, of rank 0."""

    def read(report: Any) -> Reading:
        ours, its = (report["rows"][variant][key] * scale for variant in (name, "distributed optimizer"))
        shape = report["shape"]
        return Reading(
            ours, its, {"P": shape["pipeline"], "V": shape["virtual"], "D": report["data"], "M": shape["micro_batches"]}
        )

    return read


def zero2_host(report: Any) -> Reading:
    """Host and device bytes of Pipeline ZeRO-2 against the device bytes of the distributed optimizer."""
    ours, its = (report["rows"][name] for name in ("pipeline-zero2", "distributed optimizer"))
    keys = ("device_gradient_bytes", "host_gradient_bytes", "host_staging_bytes")
    return Reading(sum(ours[key] for key in keys), sum(its[key] for key in keys))


def balance(rule: str, drifting: bool) -> Callable[[Any], Reading]:
    """Largest over mean load of 896 experts, mean over the draws: Quantile Balancing against a rule."""

    def read(report: Any) -> Reading:
        draws = row(report["rows"], experts=896, k=16, sigma=3.0, drifting=drifting)["imbalance"]
        options = report["options"]
        words = {key: options[key] for key in ("updates", "draws", "shards")}
        return Reading(*(sum(draws[name]) / len(draws[name]) for name in ("centred", rule)), words)

    return read


def bubble(p: int, v: int, m: int, key: str) -> Callable[[Any], Reading]:
    """Simulated makespan of a plan against one with the encoder in stage 0, or against the lower bound."""

    def read(report: Any) -> Reading:
        found = row(report["table"], pipeline_size=p, chunks=v, microbatches=m)
        return Reading(found["makespan"], found[key])

    return read


def bubble_executed(kind: str) -> Callable[[Any], Reading]:
    """Seconds of a step on this machine."""

    def read(report: Any) -> Reading:
        found = row(report["executed"], kind=kind)
        return Reading(found["scheduled_seconds"], found["in_stage_0_seconds"], {key: found[key] for key in "pvm"})

    return read


def activations(ours: str, peer: str, key: str, scale: float = 1.0) -> Callable[[Any], Reading]:
    """Two policies at the greatest depth."""

    def read(report: Any) -> Reading:
        layers = max(report["layers"], key=int)
        rows = report["layers"][layers]
        return Reading(rows[ours][key] * scale, rows[peer][key] * scale, {"layers": layers})

    return read
