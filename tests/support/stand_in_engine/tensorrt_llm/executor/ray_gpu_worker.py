class RayWorkerWrapper:
    @staticmethod
    def _inject_worker_extension(worker_class, extension_cls_name):
        return worker_class
