"""Bayesian LoRA: the trained encoder is frozen, and its adapters have a posterior.

    python examples/lora.py                      needs peft: pip install peft

A small encoder learns one task on sentences. PEFT adds low-rank adapters, which are trained on 120
sentences of another task: as a point estimate, an ensemble, Laplace and mean-field. All members
share the frozen encoder; only the adapters and the new classifier are weights of the posterior.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import doxa
from doxa.evaluate import metrics

WORDS, LENGTH, WIDTH = 20, 8, 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hidden, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words)
        weight = (self.query(h) @ self.key(h).mT / WIDTH**0.5).softmax(-1)
        h = h + weight @ self.value(h)
        return self.classifier(torch.relu(self.hidden(h)).mean(-2))


def sentences(n: int, seed: int) -> Tensor:
    return torch.randint(0, WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def more(words: Tensor, low: int, high: int) -> Tensor:
    """Whether a sentence has more words below `low` than words of at least `high`."""
    return ((words < low).sum(1) > (words >= high).sum(1)).long()


def main() -> None:
    from peft import LoraConfig, get_peft_model

    first = sentences(2000, 0)
    categorical = doxa.Categorical()
    trained = doxa.fit(
        Encoder(), (first, more(first, 10, 10)), "map", likelihood=categorical, steps=800
    )
    encoder = Encoder()
    encoder.load_state_dict({k: v[0] for k, v in trained.draw(1).items()})
    encoder.classifier.reset_parameters()  # for another task

    x, x_test = sentences(120, 1), sentences(1000, 2)
    y, y_test = more(x, 5, 15), more(x_test, 5, 15)
    config = LoraConfig(
        r=2, target_modules=["query", "value", "hidden"], modules_to_save=["classifier"]
    )
    net = get_peft_model(encoder, config)
    uncertain = sum(p.numel() for n, p in net.named_parameters() if "lora_" in n)
    print(f"{sum(p.numel() for p in net.parameters())} numbers, {uncertain} of them in adapters")
    for method in ("map", "deep-ensemble", "laplace", "mean-field"):
        posterior = doxa.fit(
            net, (x, y), method, subset="*lora_*", likelihood=categorical, steps=1500
        )
        score = metrics(posterior.predict(x_test), y_test)
        scores = ", ".join(f"{k} {score[k]:.3f}" for k in ("accuracy", "log_likelihood", "ece"))
        print(f"{method:14} {scores}")


if __name__ == "__main__":
    main()
