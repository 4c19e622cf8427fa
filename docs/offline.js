/* Browsers refuse workers to pages from a folder. There the search's worker runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script>postMessage = data => parent.postMessage(data, "*")</script><script src="${url}"></script>`
      this.ready = new Promise(resolve => this.frame.onload = resolve)
      this.heard = event => event.source === this.frame.contentWindow && this.onmessage?.(event)
      addEventListener("message", this.heard)
      document.body.append(this.frame)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      removeEventListener("message", this.heard)
      this.frame.remove()
    }
  }
}
