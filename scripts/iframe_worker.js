// The search of the site runs in a worker, which browsers refuse to pages that are opened as files. On such a page,
// this class runs the worker's script in a hidden frame instead. Material's search knows the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script src="${new URL(url, location)}"></script>`
      this.frame = new Promise((resolve) => (frame.onload = () => resolve(frame.contentWindow)))
      this.frame.then((inside) => {
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.frame.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
