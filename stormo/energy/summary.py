"""The energy of a run as keys of its summary and as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stormo.config.schema import Energy
from stormo.energy.ledger import JOULES_PER_KWH, Bill, cost

_NO_BILL = Bill(reasons=("measuring was turned off (--no-energy)",))
SMALLEST_SHOWN_SHARE = 0.005
_JOULES_PER_WH = JOULES_PER_KWH / 1e3
_PREFIXES = (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3))
_KIND_NAMES = {"gpu": "GPUs", "cpu": "CPUs", "dram": "memory"}


def energy_summary(
    bill: Bill | None, settings: Energy, *, num_samples: int, target_unix_s: float | None
) -> dict[str, Any]:
    """The keys of `summary.json`; None for what was not measured, and the reasons beside it."""
    bill = bill or _NO_BILL
    total_j, costs = bill.total_j, cost(bill, settings.grid_intensity, settings.energy_price)
    return {
        "energy_j": total_j,
        "energy_error_j": None if total_j is None else bill.total_error_j,
        "energy_wh": bill.total_wh,
        "energy_kinds_j": bill.kinds_j,
        "energy_parts_j": bill.parts_j,
        "energy_parts_error_j": bill.error_j,
        "energy_j_per_sample": total_j / num_samples if total_j is not None and num_samples else None,
        "energy_to_target_j": None if target_unix_s is None else bill.joules_until(target_unix_s),
        "energy_nodes": [{"node_id": one.node_id, "host": one.host, "energy_j": one.total_j} for one in bill.nodes],
        "energy_reasons": list(bill.reasons),
        "co2e_g": costs.co2e_g,
        "energy_cost": costs.money,
        "currency": None if costs.money is None else settings.currency,
    }


def energy_sentence(summary: Mapping[str, Any]) -> str:
    """The sentence on the energy at the end of a run."""
    total_j = summary["energy_j"]
    if total_j is None:
        return f"Energy: {'; '.join(summary['energy_reasons'])}."
    text = f"Energy: {amount_text(total_j, summary['energy_error_j'], summary['energy_kinds_j'])}"
    if summary["energy_j_per_sample"] is not None:
        text += f", {rounded(summary['energy_j_per_sample'])} J a sample"
    shares = {part: joules / total_j for part, joules in summary["energy_parts_j"].items()} if total_j else {}
    shown = [f"{part} {100 * share:.0f} %" for part, share in shares.items() if share >= SMALLEST_SHOWN_SHARE]
    text += f"; {', '.join(shown)}" if shown else ""
    meanings = []
    if summary["co2e_g"] is not None:
        meanings.append(f"{rounded(summary['co2e_g'])} g CO2e")
    if summary["energy_cost"] is not None:
        meanings.append(f"{rounded(summary['energy_cost'])} {summary['currency']}")
    return ". ".join([text, *([", ".join(meanings)] if meanings else [])]) + "."


def amount_text(joules: float, error_j: float, kinds_j: Mapping[str, float]) -> str:
    """Joules with their error bound, by kind of source."""
    return (
        f"{joules_text(joules)} ± {joules_text(error_j)} = {rounded(joules / _JOULES_PER_WH)} Wh{_kinds_text(kinds_j)}"
    )


def _kinds_text(kinds_j: Mapping[str, float]) -> str:
    by_name = {_KIND_NAMES.get(kind, kind): joules for kind, joules in kinds_j.items()}
    if len(by_name) == 1:
        return f" of the {next(iter(by_name))}"
    return f" ({', '.join(f'{name} {joules_text(joules)}' for name, joules in by_name.items())})"


def joules_text(joules: float) -> str:
    """Joules with the prefix that suits them."""
    for unit, size in _PREFIXES:
        if joules >= size:
            return f"{rounded(joules / size)} {unit}"
    return f"{rounded(joules)} J"


def rounded(value: float) -> str:
    """To three digits, or whole."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
