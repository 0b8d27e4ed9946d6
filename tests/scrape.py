"""What a run's metrics say, fetched over HTTP and parsed by Prometheus' own client."""

import dataclasses
import urllib.request

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One answer of the endpoint.

    Attributes:
        families: By the name in the `TYPE` line.
        values: By the sample's name and labels.
    """

    families: dict[str, Metric]
    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float:
        """The one sample with this name and these labels."""
        return self.values[name, frozenset(labels.items())]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric's samples by one label; those that are 0 are left out."""
        sums: dict[str, float] = {}
        for (sample, labels), value in self.values.items():
            if sample == name and value:
                key = dict(labels)[label]
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def names(self, prefix: str = "jaxpaged_") -> set[str]:
        """The names of its samples."""
        return {name for name, _ in self.values if name.startswith(prefix)}


def fetch(url: str) -> Scrape:
    """Asks the endpoint."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    values = {(one.name, frozenset(one.labels.items())): one.value for one in samples}
    assert len(values) == len(samples), "a sample is there twice"
    return Scrape(families={family.name: family for family in families}, values=values)
