"""What a device can do at most, by its datasheet."""

from __future__ import annotations

from workbench.devices import Datasheet, DeviceInfo, datasheet


def peak_rates(device: DeviceInfo) -> Datasheet | None:
    """The vendor's peak rates; None where they are not known, as for every CPU."""
    return datasheet(device.name) if device.type == "cuda" else None
