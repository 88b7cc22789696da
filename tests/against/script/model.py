from torch import nn


class Classifier(nn.Module):
    def __init__(self, norm="batch", dropout=0.1, channels=16, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, momentum=0.1) if norm == "batch" else nn.GroupNorm(4, channels)
        self.hidden = nn.Linear(channels * 16, 64)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(64, classes)
        nn.init.zeros_(self.head.bias)
        nn.init.normal_(self.hidden.weight, std=0.02)

    def forward(self, images):
        x = self.norm(self.conv(images)).relu()
        x = self.hidden(x.flatten(1)).relu()
        return self.head(self.dropout(x))
