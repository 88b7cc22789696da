from .registry import REGISTERED


def create_model(name, pretrained=False, num_classes=1000, **options):
    if name in REGISTERED:
        return REGISTERED[name](num_classes=num_classes, **options)
    from torchvision.models import ResNet

    model = ResNet(num_classes)
    model.default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    model.get_classifier = lambda: model.fc
    return model
