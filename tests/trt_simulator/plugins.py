class Plugins:
    def __init__(self, module, file):
        raise NotImplementedError
