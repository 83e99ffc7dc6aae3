"""What a run says of its energy, and the keys of its summary."""

from __future__ import annotations

from pathlib import Path

from stormo.config.schema import Energy
from stormo.energy import read_bill
from stormo.energy.summary import energy_sentence, energy_summary, joules_text
from tests.energy.job import Job

SCRIPT = [("starting", 2, 0), ("training", 10, 50), ("validation", 3, 50), ("checkpoint", 1, 50)]


def test_the_bill_in_one_sentence(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.attempt(SCRIPT)
    bill = read_bill(job.run_folder)
    settings = Energy(grid_intensity=300.0, energy_price=0.25, currency="CHF")
    summary = energy_summary(bill, settings, num_samples=1000, target_unix_s=12.0)
    assert bill.total_j is not None
    assert summary["energy_j"] == bill.total_j
    assert summary["energy_to_target_j"] == bill.joules_until(12.0)
    gpu_j, cpu_j = bill.kinds_j["gpu"], bill.kinds_j["cpu"]
    shares = ", ".join(f"{part} {100 * joules / bill.total_j:.0f} %" for part, joules in bill.parts_j.items() if joules)
    kwh = bill.total_j / 3.6e6
    assert energy_sentence(summary) == (
        f"Energy: {bill.total_j / 1e3:.3g} kJ ± {bill.total_error_j:.3g} J = {1e3 * kwh:.3g} Wh "
        f"(GPUs {gpu_j / 1e3:.3g} kJ, CPUs {cpu_j / 1e3:.3g} kJ), {bill.total_j / 1000:.3g} J a sample; {shares}. "
        f"{300 * kwh:.3g} g CO2e, {0.25 * kwh:.3g} CHF."
    )


def test_without_factors_a_target_or_samples_nothing_is_made_up(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.attempt(SCRIPT)
    summary = energy_summary(read_bill(job.run_folder), Energy(), num_samples=0, target_unix_s=None)
    for key in ("co2e_g", "energy_cost", "currency", "energy_j_per_sample", "energy_to_target_j"):
        assert summary[key] is None
    assert "sample" not in str(energy_sentence(summary))


def test_nothing_measured_gives_the_reason(tmp_path: Path) -> None:
    nothing = energy_summary(read_bill(tmp_path), Energy(grid_intensity=300.0), num_samples=1, target_unix_s=1.0)
    assert nothing["energy_j"] is nothing["energy_error_j"] is nothing["co2e_g"] is None
    assert str(energy_sentence(nothing)).startswith("Energy: no node wrote what it drew")
    off = energy_summary(None, Energy(energy=False), num_samples=1, target_unix_s=None)
    assert off.keys() == nothing.keys()


def test_joules_have_the_prefix_that_suits_them() -> None:
    assert [joules_text(value) for value in (0.0, 0.25, 999.0, 999.7, 1e3, 999_600.0, 2.5e6, 7.2e12)] == [
        "0 J",
        "0.25 J",
        "999 J",
        "1,000 J",
        "1 kJ",
        "1,000 kJ",
        "2.5 MJ",
        "7,200 GJ",
    ]
