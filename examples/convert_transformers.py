"""Convert a small Llama from softmax to sigmoid attention, fine-tune it with Trainer, save it, load it and generate.

    python examples/convert_transformers.py                   # 4 layers, 300 steps, two to ten minutes on two cores
    python examples/convert_transformers.py --distil 1        # fine-tuned towards the softmax model's probabilities too

Everything runs offline: the text is Python's language reference, which CPython contains (or ``--text``), and the
softmax model is trained on the spot. Needs ``pip install "sigattn[transformers]"``. docs/convert.md shows a result.
"""

import argparse
import copy
import math
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sigattn import convert
from sigattn.data.text import load_text
from sigattn.integrations import transformers as sigmoid


class Bytes(torch.utils.data.Dataset):
    """Pieces of a text, of ``length`` bytes each."""

    def __init__(self, text, length):
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self):
        return len(self.ids) // self.length

    def __getitem__(self, index):
        ids = self.ids[index * self.length : (index + 1) * self.length]
        return {"input_ids": ids, "labels": ids}

    def batches(self, count, size):
        """Return the first pieces, ``count`` batches of ``size``."""
        pieces = self.ids[: count * size * self.length].view(count, size, self.length)
        return [{"input_ids": ids, "labels": ids} for ids in pieces]


class DistillingTrainer(Trainer):
    """Trainer that adds the divergence of the model's next-byte probabilities from a teacher's to the loss."""

    def __init__(self, *args, teacher, weight, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.weight = teacher.eval(), weight

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """Return the language model's loss + weight · KL(teacher ‖ model)."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits.log_softmax(-1).flatten(0, 1)
        found = outputs.logits.log_softmax(-1).flatten(0, 1)
        loss = loss + self.weight * F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        return (loss, outputs) if return_outputs else loss


def train(model, data, options, steps, learning_rate, teacher=None):
    """Train a model in place with Hugging Face's Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(20, steps // 5),
            weight_decay=0.1,
            adam_beta2=0.95,
            seed=options.seed,
            save_strategy="no",
            logging_steps=50,
            disable_tqdm=True,
            report_to=[],
        )
        if teacher is None:
            Trainer(model, arguments, train_dataset=data).train()
        else:
            DistillingTrainer(model, arguments, train_dataset=data, teacher=teacher, weight=options.distil).train()


@torch.no_grad()
def bits_per_byte(model, batches):
    """Return the mean loss of a model over batches."""
    model.eval()
    return sum(float(model(**batch).loss) for batch in batches) / len(batches) / math.log(2)


def main():
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file or a folder; default: Python's language reference")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the softmax model")
    parser.add_argument("--finetune-steps", type=int, default=30, help="training steps after the conversion")
    parser.add_argument("--distil", type=float, default=0.0, help="weight of the divergence from the softmax model")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("converted"), help="where the converted model is saved")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    text = load_text(options.text)
    data = Bytes(text[: len(text) * 9 // 10], options.length)
    held_out = Bytes(text[len(text) * 9 // 10 :], options.length).batches(8, 16)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=3 * options.width, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=options.layers, max_position_embeddings=4 * options.length,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    train(model, data, options, options.steps, 2e-3)
    softmax = copy.deepcopy(model)
    results = {"softmax": bits_per_byte(model, held_out)}

    report = convert(model, data.batches(8, options.batch_size))  # in place, seconds
    print(report)
    results["sigmoid, converted"] = bits_per_byte(model, held_out)
    sigmoid.check(model, **held_out[0])  # raises if any softmax attention were left

    train(model, data, options, options.finetune_steps, 1e-3, copy.deepcopy(softmax) if options.distil else None)
    train(softmax, data, options, options.finetune_steps, 1e-3)
    results[f"sigmoid, {options.finetune_steps} steps later"] = bits_per_byte(model, held_out)
    results[f"softmax, {options.finetune_steps} steps later"] = bits_per_byte(softmax, held_out)

    model.save_pretrained(options.folder)
    loaded = AutoModelForCausalLM.from_pretrained(options.folder)  # in a new process import the integration first
    prompt = torch.tensor([list(b"The for statement is used to ")])
    print(bytes(loaded.generate(prompt, max_new_tokens=120, do_sample=False)[0].tolist()).decode(errors="replace"))
    print("\nbits per byte of held-out text")
    for name, value in results.items():
        print(f"  {name:28} {value:.3f}")


if __name__ == "__main__":
    main()
