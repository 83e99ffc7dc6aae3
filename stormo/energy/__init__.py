"""Measured energy: probes of the hardware, the meter over them, and the bill of a run from what its nodes wrote."""

from stormo.energy.ledger import Bill, Cost, cost, read_bill
from stormo.energy.meter import Meter, own_meter
from stormo.energy.probes import Missing, Probe, Source
from stormo.energy.replay import ReplayProbe, record_trace

__all__ = [
    "Bill",
    "Cost",
    "Meter",
    "Missing",
    "Probe",
    "ReplayProbe",
    "Source",
    "cost",
    "own_meter",
    "read_bill",
    "record_trace",
]
