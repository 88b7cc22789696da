import hashlib


class Hasher:
    def __init__(self):
        self.digest = hashlib.md5()

    @classmethod
    def hash(cls, value):
        return hashlib.md5(repr(value).encode()).hexdigest()

    def update(self, value):
        self.digest.update(repr(value).encode())

    def hexdigest(self):
        return self.digest.hexdigest()
