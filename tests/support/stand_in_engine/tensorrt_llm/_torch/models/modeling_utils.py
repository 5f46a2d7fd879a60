MODEL_CLASS_MAPPING = {}


def register_auto_model(name):
    def decorator(cls):
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator
