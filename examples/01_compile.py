"""Mixed precision for a training loop of your own: one call, and the loop stays as it is.

python examples/01_compile.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.hidden = nn.Linear(32, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.norm(x))))


def main(backend: str = "inductor", steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    features = torch.randn(512, 32, device=device)
    labels = (features @ torch.randn(32, 3, device=device)).argmax(1)

    model = Classifier().to(device)
    fast = amp.compile(model, rules="default", dtype="bf16", backend=backend)  # the same parameters, the same calls
    optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-2)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    fast.eval()
    with torch.no_grad():
        accuracy = (fast(features).argmax(1) == labels).float().mean().item()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.0%}")
    print("state_dict keys are the model's own:", list(fast.state_dict()) == list(model.state_dict()))
    print(fast.plan)
    return losses


if __name__ == "__main__":
    main()
