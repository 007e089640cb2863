"""zerolap on Acme devices."""

import zerolap_sim  # stands in for the extension that brings Acme's devices to torch
from zerolap import Capabilities, StreamAdapter

zerolap_sim.install("acme", "acmeccl")


class AcmeAdapter(StreamAdapter):
    name = "acme"
    device_type = "acme"  # as in torch.device("acme")
    backend = "acmeccl"  # as in init_process_group("acmeccl")
    capabilities = Capabilities(
        futures_complete_at_enqueue=True,
        exact_cut=64,
        has_float64=True,
        one_issue_order=True,
    )

    def device(self, local_rank):
        return super().device(0)  # a real card would be the local rank's
