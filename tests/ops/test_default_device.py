"""Calls under a default device other than the CPU: cached constants must not be created on it."""

import subprocess
import sys
import textwrap

# Each way of the CPU backend that keeps constants, as a call; in a process of its own, because they are kept for good.
CALLS = {
    "short": "torch.autograd.grad(sigmoid_attention(q, q, q, is_causal=True, bias=-1.5).sum(), q)[0]",
    "short bfloat16": "sigmoid_attention(*[p.bfloat16()] * 3, window=(40, 0), bias=-1.5)",
    "fused": "sigmoid_attention(*[torch.randn(1, 1, 700, 16, device='cpu', generator=seed)] * 3)",
    "reference": "sigmoid_attention(q, q, q, bias=-1.5, dropout_p=0.2, backend='reference')",
    "dropout": "sigmoid_attention(q, q, q, dropout_p=0.2)",
    "statistics": "sigattn.attention_statistics(q, q, q, activation='softmax').row_mass_mean",
    "cache": "sigattn.flash.flash_attn_with_kvcache(c[:, -1:], c, c, cache_seqlens=64, sigmoid_bias=-1.5)",
    "packed": "sigattn.flash.flash_attn_varlen_func(c[0], c[0], c[0], starts, starts, 40, 40, sigmoid_bias=-1.5)",
    "filters": "mel_filters(400, 16000, 8)",
}
PROGRAM = """
    import sys
    import torch

    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    p = q.detach()
    c = p.transpose(1, 2).contiguous()
    starts = torch.tensor([0, 24, 64])

    def results(calls):
        found = {{}}
        for name, call in calls.items():
            seed = torch.Generator("cpu").manual_seed(0)
            torch.manual_seed(3)
            found[name] = eval(call, globals() | {{"seed": seed}})
        return found

    with torch.device("meta"):
        import sigattn
        import sigattn.flash
        from sigattn import sigmoid_attention
        from sigattn.data.speech import mel_filters

        first = results({calls!r})
    for name, again in results({calls!r}).items():
        assert again.device.type == first[name].device.type == "cpu", (name, again.device, first[name].device)
        assert torch.equal(first[name], again), name
"""


def test_a_first_call_under_another_default_device():
    program = textwrap.dedent(PROGRAM).format(calls=CALLS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
