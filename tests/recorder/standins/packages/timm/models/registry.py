REGISTERED = {}


def register_model(function):
    REGISTERED[function.__name__] = function
    return function
