"""Small residual networks under torchvision's names."""

from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return (x + self.bn(self.conv(x))).relu()


class ResNet(nn.Module):
    def __init__(self, num_classes=1000, zero_init_residual=False):
        super().__init__()
        self.conv1, self.layer1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), Block(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.layer1(self.conv1(x)).mean((2, 3)))


def resnet18(pretrained=False, weights=None, num_classes=1000, zero_init_residual=False):
    return ResNet(num_classes)


resnet50 = resnet34 = resnet18
